"""The conversations behind API calls that name none: which call continues which, and when its tools will have answered."""
