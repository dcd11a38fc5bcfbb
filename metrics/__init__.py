"""The metrics of this package for evaluate, each in a folder that is a Space of the Hub as well."""
