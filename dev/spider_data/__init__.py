"""Makes the bundled data in the shape of Spider."""
