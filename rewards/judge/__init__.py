"""The judge: scores an answer in prose against a reference, by a model or by rules, or abstains."""

from __future__ import annotations

from groundwire.rewards.judge.engine import Judge, Verdict
from groundwire.rewards.judge.settings import JudgeSettings, JudgeSettingsError

__all__ = ["Judge", "JudgeSettings", "JudgeSettingsError", "Verdict"]
