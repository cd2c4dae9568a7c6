"""Plain scripts, each printing one small table: ``python -m benchmarks.bench_proxy``."""
