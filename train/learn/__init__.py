"""``groundwire learn``: from exported traces to a model that was measured."""
