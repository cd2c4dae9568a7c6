"""A job: checked settings with their data, agent and reward."""
