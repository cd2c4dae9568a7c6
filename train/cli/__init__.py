"""What the commands share: options, progress, exit codes."""
