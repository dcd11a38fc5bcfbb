"""Modules tried by themselves: copies in double precision, narrowed, with random weights, moved and run again."""
