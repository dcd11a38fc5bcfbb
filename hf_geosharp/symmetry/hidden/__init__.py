"""Hidden units read off a trace: what scales, two maps in a row, and experts that no token reached."""
