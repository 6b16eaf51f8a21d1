"""The subcommands of `overture` beside `serve` and `chat`."""
