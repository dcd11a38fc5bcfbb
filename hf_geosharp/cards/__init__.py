"""Scores in model cards: bytes of a README in, bytes out, with all that is not ours left as it was."""
