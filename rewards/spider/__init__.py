"""Spider: the rewards of its official evaluation."""
