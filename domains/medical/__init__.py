"""Medical: questions on drugs and diseases, answered in prose, in English and Chinese. The bundled data is fiction."""

from __future__ import annotations

from groundwire.domains.medical.loader import MedicalDomain, domain

__all__ = ["MedicalDomain", "domain"]
