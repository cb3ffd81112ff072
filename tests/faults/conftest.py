"""Fault tests start real processes: one group, so that two of them do not share the cores."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("faults"))
