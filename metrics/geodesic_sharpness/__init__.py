"""The metric's folder: ``evaluate.load`` takes its path, and it can be pushed to the Hub as a Space."""
