"""What can be divided out without a quotient: gains, layer scales, means and constants that nothing sees."""
