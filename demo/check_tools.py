"""Measures tool calls of a served model: questions that need one of the tools offered, and small talk that needs none.

    pip install openai
    python demo/check_tools.py --base-url http://127.0.0.1:8000/v1 --model overture-demo

`tool_choice` is "auto" and answers are greedy. The tools of "unseen" and "fresh" and their arguments have names that the training
text of the demo model gives to none; those of "common" are such as tutorials have. The last line is JSON; what went wrong stands above it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from typing import Any

NUMBER, TEXT = "number", "string"
# Name: what it says of itself, and the kinds of its arguments.
TOOLS: dict[str, tuple[str, dict[str, str]]] = {
    "measure_altitude": ("The altitude of a mountain.", {"mountain": TEXT}),
    "exchange_rate": ("The exchange rate of a coin.", {"coin": TEXT}),
    "humidity_report": ("The humidity in a region.", {"region": TEXT}),
    "next_train": ("The next train to a station.", {"station": TEXT}),
    "author_lookup": ("The author of a book.", {"book": TEXT}),
    "count_calories": ("The calories of a food.", {"food": TEXT}),
    "track_parcel": ("Where a parcel is.", {"parcel": TEXT}),
    "switch_light": ("Switches the light of a room.", {"room": TEXT}),
    "set_timer": ("Sets a timer.", {"minutes": NUMBER}),
    "divide_numbers": ("Divides two numbers.", {"numerator": NUMBER, "denominator": NUMBER}),
    "raise_power": ("Raises a number to a power.", {"base": NUMBER, "exponent": NUMBER}),
    "miles_to_km": ("Converts miles to kilometers.", {"miles": NUMBER}),
    "route_length": ("The distance between two towns.", {"origin": TEXT, "destination": TEXT}),
    "translate_phrase": ("Translates a phrase.", {"phrase": TEXT}),
    "forecastFor": ("The weather of tomorrow.", {"municipality": TEXT}),
    "employee_salary": ("The salary of an employee.", {"employee": TEXT}),
    "stock_quote": ("The price of a stock.", {"ticker": TEXT}),
    "create_ticket": ("Creates a ticket.", {"summary": TEXT}),
    "zone_clock": ("The time in a zone.", {"zone": TEXT}),
    "mix_colors": ("Mixes two colors.", {"one": TEXT, "other": TEXT}),
}
# Written after the last change of the training text.
FRESH_TOOLS: dict[str, tuple[str, dict[str, str]]] = {
    "wind_speed": ("The wind speed in a town.", {"town_name": TEXT}),
    "hotel_rooms": ("The free rooms of a hotel.", {"hotel_name": TEXT}),
    "movie_year": ("The year of a movie.", {"movie": TEXT}),
    "pay_invoice": ("Pays an invoice.", {"invoice": NUMBER}),
    "lock_door": ("Locks a door.", {"door": TEXT}),
    "cube_volume": ("The volume of a cube.", {"edge": NUMBER}),
    "grams_to_ounces": ("Converts grams to ounces.", {"weight": NUMBER}),
    "match_result": ("The result of the last match of a team.", {"team": TEXT}),
    "species_of": ("The species of an animal.", {"animal": TEXT}),
    "ferry_time": ("When the ferry goes.", {"harbor": TEXT, "island": TEXT}),
    "rename_folder": ("Renames a folder.", {"old": TEXT, "new": TEXT}),
    "member_points": ("The points of a member.", {"member": NUMBER}),
    "boiling_point": ("The boiling point of a liquid.", {"liquid": TEXT}),
    "print_label": ("Prints a label.", {"label": TEXT}),
    "remainder": ("The remainder of a division.", {"dividend": NUMBER, "divisor": NUMBER}),
    "sunrise": ("The time of the sunrise.", {"spot": TEXT}),
    "lecture_room": ("The room of a lecture.", {"lecture": TEXT}),
    "unit_cost": ("The cost of a part.", {"part": TEXT}),
    "garage_level": ("The level of a garage.", {"garage": TEXT}),
    "ring_bell": ("Rings the bell.", {"rings": NUMBER}),
}
# As tutorials have them.
COMMON_TOOLS: dict[str, tuple[str, dict[str, str]]] = {
    "get_stock_price": ("Get the current stock price of a company.", {"symbol": TEXT}),
    "get_news": ("Get the latest news about a topic.", {"topic": TEXT}),
    "search_web": ("Search the web.", {"query": TEXT}),
    "roll_dice": ("Roll a dice with that many sides.", {"sides": NUMBER}),
    "calculate_tip": ("Calculate the tip for a bill.", {"bill": NUMBER, "percent": NUMBER}),
    "get_user": ("Get a user by id.", {"user_id": NUMBER}),
    "order_status": ("The status of an order.", {"order_id": NUMBER}),
    "play_music": ("Play music by an artist.", {"artist": TEXT}),
    "get_temperature": ("Get the temperature in a location.", {"location": TEXT}),
    "square_root": ("The square root of a number.", {"number": NUMBER}),
    "is_prime": ("Whether a number is prime.", {"n": NUMBER}),
    "reverse_text": ("Reverse a text.", {"text": TEXT}),
    "find_restaurant": ("Find a restaurant in a city.", {"city": TEXT}),
    "random_number": ("A random number between two numbers.", {"low": NUMBER, "high": NUMBER}),
    "book_flight": ("Book a flight.", {"origin": TEXT, "destination": TEXT}),
    "send_email": ("Send an email to a person.", {"recipient": TEXT}),
    "add_event": ("Add an event to the calendar.", {"title": TEXT}),
    "get_definition": ("The definition of a word.", {"word": TEXT}),
    "convert_celsius": ("Convert Celsius to Fahrenheit.", {"celsius": NUMBER}),
    "get_time": ("Get the current time in a city.", {"city": TEXT}),
}
# The question, the tool for it, its arguments, what it returns, and what an answer must say of that.
Question = tuple[str, str, dict[str, Any], str, str]
QUESTIONS: tuple[Question, ...] = (
    ("What is the altitude of Kilorn?", "measure_altitude", {"mountain": "Kilorn"}, "3120", "3120"),
    ("How high is Bredwal?", "measure_altitude", {"mountain": "Bredwal"}, "870", "870"),
    ("What is the exchange rate of Zandu?", "exchange_rate", {"coin": "Zandu"}, "17", "17"),
    ("How much is one Peruk worth?", "exchange_rate", {"coin": "Peruk"}, "42", "42"),
    ("What is the humidity in Talbria?", "humidity_report", {"region": "Talbria"}, "61", "61"),
    ("Tell me the humidity of Worsk.", "humidity_report", {"region": "Worsk"}, '{"humidity": 38}', "38"),
    ("When is the next train to Dunmarl?", "next_train", {"station": "Dunmarl"}, "14:05", "14:05"),
    ("Which train goes to Hesk?", "next_train", {"station": "Hesk"}, "09:40", "09:40"),
    ("Who is the author of Silmarion?", "author_lookup", {"book": "Silmarion"}, "Vorlek", "Vorlek"),
    ("Who wrote Tabrun?", "author_lookup", {"book": "Tabrun"}, "Mirsa", "Mirsa"),
    ("How many calories has gorfel?", "count_calories", {"food": "gorfel"}, "310", "310"),
    ("Tell me the calories of pizza.", "count_calories", {"food": "pizza"}, "900", "900"),
    ("Track the parcel Brixel.", "track_parcel", {"parcel": "Brixel"}, "ready", "ready"),
    ("Where is my parcel Vintor?", "track_parcel", {"parcel": "Vintor"}, "Paris", "Paris"),
    ("Switch the light of the kitchen.", "switch_light", {"room": "kitchen"}, "done", "done"),
    ("Please switch on the light in the cellar.", "switch_light", {"room": "cellar"}, "ok", "ok"),
    ("Set a timer for 12 minutes.", "set_timer", {"minutes": 12}, "ok", "ok"),
    ("Wake me in 45 minutes.", "set_timer", {"minutes": 45}, "done", "done"),
    ("What is 84 divided by 7?", "divide_numbers", {"numerator": 84, "denominator": 7}, "12", "12"),
    ("Divide 360 by 40.", "divide_numbers", {"numerator": 360, "denominator": 40}, "9", "9"),
    ("What is 2 to the power of 10?", "raise_power", {"base": 2, "exponent": 10}, "1024", "1024"),
    ("Raise 5 to the power of 3.", "raise_power", {"base": 5, "exponent": 3}, "125", "125"),
    ("How many kilometers are 26 miles?", "miles_to_km", {"miles": 26}, "42", "42"),
    ("Convert 100 miles to kilometers.", "miles_to_km", {"miles": 100}, '{"km": 161}', "161"),
    ("How far is it from Oslun to Bergam?", "route_length", {"origin": "Oslun", "destination": "Bergam"}, "463", "463"),
    ("What is the distance from Rome to Paris?", "route_length", {"origin": "Rome", "destination": "Paris"}, "1420", "1420"),
    ("Translate hello.", "translate_phrase", {"phrase": "hello"}, "bonjour", "bonjour"),
    ("Please translate Fremdal.", "translate_phrase", {"phrase": "Fremdal"}, "stranger", "stranger"),
    ("What is the weather in Quorim?", "forecastFor", {"municipality": "Quorim"}, "rainy, 11 degrees", "rainy"),
    ("Will it rain in Berlin tomorrow?", "forecastFor", {"municipality": "Berlin"}, "cloudy", "cloudy"),
    ("What is the salary of Jorvek?", "employee_salary", {"employee": "Jorvek"}, '{"salary": 5200}', "5200"),
    ("How much does Anna earn?", "employee_salary", {"employee": "Anna"}, "4100", "4100"),
    ("What is the price of Nexor?", "stock_quote", {"ticker": "Nexor"}, "88", "88"),
    ("Give me the stock price of Aldine.", "stock_quote", {"ticker": "Aldine"}, "231", "231"),
    ("Create a ticket Printer.", "create_ticket", {"summary": "Printer"}, "saved", "saved"),
    ("Can you create a ticket Login?", "create_ticket", {"summary": "Login"}, "done", "done"),
    ("What time is it in Utrel?", "zone_clock", {"zone": "Utrel"}, "18:22", "18:22"),
    ("Tell me the time in Madrid.", "zone_clock", {"zone": "Madrid"}, '{"time": "07:15"}', "07:15"),
    ("Mix red and blue.", "mix_colors", {"one": "red", "other": "blue"}, "purple", "purple"),
    ("What do yellow and green give?", "mix_colors", {"one": "yellow", "other": "green"}, "lime", "lime"),
)  # fmt: skip
FRESH_QUESTIONS: tuple[Question, ...] = (
    ("What is the wind speed in Gravel?", "wind_speed", {"town_name": "Gravel"}, "31", "31"),
    ("How many free rooms does Bellamar have?", "hotel_rooms", {"hotel_name": "Bellamar"}, "5", "5"),
    ("What is the year of the movie Ostara?", "movie_year", {"movie": "Ostara"}, "1987", "1987"),
    ("Pay the invoice 512.", "pay_invoice", {"invoice": 512}, "done", "done"),
    ("Lock the door Kelder.", "lock_door", {"door": "Kelder"}, "ok", "ok"),
    ("What is the volume of a cube with edge 3?", "cube_volume", {"edge": 3}, "27", "27"),
    ("How many ounces are 250 grams?", "grams_to_ounces", {"weight": 250}, "8", "8"),
    ("What was the result of Fortuna?", "match_result", {"team": "Fortuna"}, "drawn", "drawn"),
    ("What is the species of Nemo?", "species_of", {"animal": "Nemo"}, "fish", "fish"),
    ("When goes the ferry from Husnum to Amrol?", "ferry_time", {"harbor": "Husnum", "island": "Amrol"}, "16:45", "16:45"),
    ("Rename the folder drafts to letters.", "rename_folder", {"old": "drafts", "new": "letters"}, "ok", "ok"),
    ("How many points has member 77?", "member_points", {"member": 77}, "940", "940"),
    ("What is the boiling point of water?", "boiling_point", {"liquid": "water"}, "100", "100"),
    ("Print the label Fragile.", "print_label", {"label": "Fragile"}, "done", "done"),
    ("What is the remainder of 29 and 6?", "remainder", {"dividend": 29, "divisor": 6}, "5", "5"),
    ("When is the sunrise in Tromso?", "sunrise", {"spot": "Tromso"}, "08:12", "08:12"),
    ("In which room is the lecture Botany?", "lecture_room", {"lecture": "Botany"}, "204", "204"),
    ("What is the cost of a Sprocket?", "unit_cost", {"part": "Sprocket"}, "14", "14"),
    ("Tell me the level of the garage Nordal.", "garage_level", {"garage": "Nordal"}, "2", "2"),
    ("Ring the bell 3 times.", "ring_bell", {"rings": 3}, "ok", "ok"),
)  # fmt: skip
COMMON_QUESTIONS: tuple[Question, ...] = (
    ("What is the stock price of Apple?", "get_stock_price", {"symbol": "Apple"}, "231", "231"),
    ("Get the news about football.", "get_news", {"topic": "football"}, "Norway won.", "Norway"),
    ("Search the web for cats.", "search_web", {"query": "cats"}, "Cats are small animals.", "animals"),
    ("Roll a dice with 20 sides.", "roll_dice", {"sides": 20}, "13", "13"),
    ("Calculate the tip for a bill of 80 with 15 percent.", "calculate_tip", {"bill": 80, "percent": 15}, "12", "12"),
    ("Who is the user 42?", "get_user", {"user_id": 42}, '{"name": "Maria"}', "Maria"),
    ("What is the status of order 1234?", "order_status", {"order_id": 1234}, "shipped", "shipped"),
    ("Play music by Mozart.", "play_music", {"artist": "Mozart"}, "ok", "ok"),
    ("What is the temperature in Oslo?", "get_temperature", {"location": "Oslo"}, "17 degrees", "17"),
    ("What is the square root of 81?", "square_root", {"number": 81}, "9", "9"),
    ("Is 17 a prime number?", "is_prime", {"n": 17}, "true", "true"),
    ("Reverse the text apple.", "reverse_text", {"text": "apple"}, "elppa", "elppa"),
    ("Find a restaurant in Rome.", "find_restaurant", {"city": "Rome"}, "Da Enzo", "Da Enzo"),
    ("Give me a random number between 1 and 6.", "random_number", {"low": 1, "high": 6}, "4", "4"),
    ("Book a flight from Berlin to Madrid.", "book_flight", {"origin": "Berlin", "destination": "Madrid"}, "done", "done"),
    ("Send an email to Anna.", "send_email", {"recipient": "Anna"}, "sent", "sent"),
    ("Add the event Party.", "add_event", {"title": "Party"}, "ok", "ok"),
    ("What is the definition of river?", "get_definition", {"word": "river"}, "A large stream.", "stream"),
    ("Convert 20 Celsius to Fahrenheit.", "convert_celsius", {"celsius": 20}, "68", "68"),
    ("What time is it in Tokyo?", "get_time", {"city": "Tokyo"}, "09:30", "09:30"),
)  # fmt: skip
SMALL_TALK = (
    "Hello!", "Hi there", "Good morning!", "How are you?", "Who are you?", "What can you do?", "Thank you!", "Thanks a lot",
    "Tell me a joke.", "My name is Ferdal.", "I live in Ostrim.", "My secret word is plover.", "I like pizza.", "I am tired.",
    "Goodbye!", "See you tomorrow", "That is nice.", "What color is the sky?", "What is the capital of France?", "You are funny.",
)  # fmt: skip


def described(name: str, about: str, kinds: dict[str, str]) -> dict[str, Any]:
    """A tool as OpenAI's API takes it."""
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    schema = {"type": "object", "properties": properties, "required": list(kinds)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


def offer(
    tools: dict[str, tuple[str, dict[str, str]]], rng: random.Random, index: int, needed: str = ""
) -> list:
    """One to four of the tools in random order, by turns; the needed one is among them."""
    others = [name for name in tools if name != needed]
    names = rng.sample(others, index % 4 if needed else 1 + index % 4) + [needed] * bool(needed)
    rng.shuffle(names)
    return [described(name, *tools[name]) for name in names]


def share(hits: list[bool]) -> dict[str, Any]:
    """Count, total and rate of outcomes."""
    return {"right": sum(hits), "asked": len(hits), "rate": round(sum(hits) / len(hits), 3)}


class Measurement:
    """Asks one model. `chat`: answers messages with tools offered."""

    def __init__(self, base_url: str, api_key: str, model: str, seed: int):
        from openai import OpenAI

        self.model, self.rng = model, random.Random(seed)
        self.sdk = OpenAI(base_url=base_url, api_key=api_key)

    def chat(self, messages: list[Any], tools: list[Any]) -> Any:
        """The model's message."""
        wish: Any = {"temperature": 0, "max_tokens": 120}
        if tools:
            wish |= {"tools": tools, "tool_choice": "auto"}
        return (
            self.sdk.chat.completions.create(model=self.model, messages=messages, **wish).choices[0].message
        )

    def questions(self, offered: dict[str, Any], questions: tuple[Any, ...]) -> dict[str, Any]:
        """The shares of what was right, and of right calls by the number of tools offered."""
        found = [self.question(offered, index, *question) for index, question in enumerate(questions)]
        shares: dict[str, Any] = {key: share([each[key] for each in found]) for key in found[0]}
        return shares | {
            "call_by_tools": {str(n + 1): share([each["call"] for each in found[n::4]]) for n in range(4)}
        }

    def question(
        self,
        offered: dict[str, Any],
        index: int,
        text: str,
        name: str,
        arguments: dict[str, Any],
        result: str,
        says: str,
    ) -> dict[str, bool]:
        """What was right of one question: that there was a call, its tool, the whole call, and the answer to the right call's result."""
        tools = offer(offered, self.rng, index, name)
        messages: list[Any] = [{"role": "user", "content": text}]
        said = self.chat(messages, tools)
        calls = [(c.function.name, json.loads(c.function.arguments)) for c in said.tool_calls or ()]
        right = {"id": "call_1", "type": "function"} | {
            "function": {"name": name, "arguments": json.dumps(arguments)}
        }
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [right]},
            {"role": "tool", "tool_call_id": "call_1", "content": result},
        ]
        told = self.chat(messages, tools)
        found = {
            "called": bool(calls),
            "tool": [each for each, _ in calls] == [name],
            "call": calls == [(name, arguments)],
            "answer": not told.tool_calls and bool(re.search(rf"\b{says}\b", told.content or "")),
        }
        if not all(found.values()):
            print(
                f"{len(tools)} tools  {text}  {calls or said.content!r}  {result} -> {told.content!r}",
                flush=True,
            )
        return found

    def without_tools(self, question: str) -> bool:
        """Whether a question for a tool is answered in text where none is offered."""
        said = self.chat([{"role": "user", "content": question}], [])
        return not said.tool_calls and "<tool" not in (said.content or "<tool")

    def small_talk(self, index: int) -> bool:
        """Whether there was an answer in text."""
        said = self.chat(
            [{"role": "user", "content": SMALL_TALK[index]}], offer(TOOLS | COMMON_TOOLS, self.rng, index)
        )
        if said.tool_calls:
            print(
                f"small talk  {SMALL_TALK[index]}  {[c.function.name for c in said.tool_calls]}", flush=True
            )
        return bool(said.content) and not said.tool_calls


def main() -> None:
    """Ask every question and print the shares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="(default: %(default)s)")
    parser.add_argument("--model", default="overture-demo", help="(default: %(default)s)")
    parser.add_argument("--api-key", default="none", help="where the server asks for one")
    parser.add_argument(
        "--seed", type=int, default=7, help="which other tools are offered (default: %(default)s)"
    )
    args = parser.parse_args()
    measurement = Measurement(args.base_url, args.api_key, args.model, args.seed)
    report = {
        "unseen": measurement.questions(TOOLS, QUESTIONS),
        "fresh": measurement.questions(FRESH_TOOLS, FRESH_QUESTIONS),
        "common": measurement.questions(COMMON_TOOLS, COMMON_QUESTIONS),
    }
    report["no_call"] = share([measurement.small_talk(i) for i in range(len(SMALL_TALK))])
    asked = [*QUESTIONS, *FRESH_QUESTIONS, *COMMON_QUESTIONS]
    report["no_call_without_tools"] = share([measurement.without_tools(text) for text, *_ in asked])
    print(json.dumps(report))


if __name__ == "__main__":
    main()
