"""Heads read off a trace: which features meet, what groups that leaves them, and what their norms exchange."""
