"""The learning algorithms' formulas, which both trainers share."""
