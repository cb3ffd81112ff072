"""Options of the engine tests."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--operations",
        type=int,
        help="operations of the state machine test, instead of 1,000,000;"
        " name tests/engine/test_state_machine.py on the command line with it",
    )
