"""The one tool and the one structured answer that the scripts ask for, for clients that bring pydantic."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Weather(BaseModel):
    """Where somebody asks about the weather."""

    city: str = Field(max_length=20)


def get_weather(city: str) -> str:
    """Today's weather in a city."""
    return f"Sunny in {city}."
