"""Makes the starter policy from random weights."""
