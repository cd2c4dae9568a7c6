"""Makes the bundled medical data."""
