"""The tiers of a parametrized test: a covering few of its cases run by default, the others by ``make test-slow``."""

import itertools

import pytest


def slow(*case, **options):
    """Return a case that runs by ``make test-slow``."""
    return pytest.param(*case, marks=pytest.mark.slow, **options)


def covering(cases, default):
    """Return all ``cases``; those that are not in ``default`` are slow."""
    all_cases = list(cases)
    missing = [case for case in default if case not in all_cases]
    assert not missing, f"expected cases of the test, got {missing}"
    return [case if case in default else slow(*(case if isinstance(case, tuple) else (case,))) for case in all_cases]


def grid(*values, default):
    """Return the product of ``values``, of which ``default`` runs by default."""
    return covering(itertools.product(*values), default)
