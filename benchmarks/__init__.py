"""Plain scripts, each printing one small table: ``python -m benchmarks.tracing.proxy``."""
