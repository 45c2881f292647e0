"""All models, by name."""

from __future__ import annotations

from support.models import language, vision
from support.models.model import Family

ZOO: dict[str, Family] = {family.title: family for family in [*language.MODELS, *vision.MODELS]}
