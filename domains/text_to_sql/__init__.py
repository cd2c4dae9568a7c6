"""What Text-to-SQL domains share: golds and their checks, neighbours, and the folder that ``prepare`` writes."""
