"""What Text-to-SQL domains share: golds and their checks, and the folder that ``prepare`` writes."""
