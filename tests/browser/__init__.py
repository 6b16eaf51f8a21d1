"""A package to pytest, which so knows when its fixtures are over: one browser serves all of these tests."""
