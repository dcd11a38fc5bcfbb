"""A score as one page that stands on its own, and its pictures as files. Needs matplotlib, installed on request."""
