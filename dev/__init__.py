"""How the starter policy and the bundled data were made, and the benchmarks on GPUs: for a clone, not in the wheel.

``python -m dev.pretrain``, ``python -m dev.spider_data``, ``python -m dev.medical_data``, ``python -m dev.gpu``, and
``python -m dev.settings_page`` and ``python -m dev.commands_page``, which write docs/settings.md and docs/commands.md;
``python -m dev.pages``, which looks at HTML pages in Chromium.
"""
