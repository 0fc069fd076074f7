from __future__ import annotations

from tests.bench.conftest import build as build
