"""Worst-case and average sharpness on a space: objective, ascent, estimates and results."""
