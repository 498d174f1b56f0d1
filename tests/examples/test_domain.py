"""The lab's tools: results are functions of seed and arguments; bad calls give errors, never
exceptions.
"""

import pytest

from examples.tool_lab.domain import TOOLS, World, call_problem, execute
from examples.tool_lab.names import is_held_out


def world(seed: int = 3) -> World:
    return World(
        seed=seed, held_out=True, cities={"Brakol"}, hotels={"Kopra"}, currencies={"EUR", "USD"}
    )


def test_four_tools_with_schemas():
    assert [tool["function"]["name"] for tool in TOOLS] == [
        "get_weather",
        "find_hotels",
        "book_hotel",
        "convert_money",
    ]


def test_weather_is_seeded_and_consistent():
    first = execute(world(), "get_weather", {"city": "Brakol"})
    assert first == execute(world(), "get_weather", {"city": "Brakol"})
    assert first["temp_f"] == round(first["temp_c"] * 9 / 5 + 32)
    others = [execute(world(seed), "get_weather", {"city": "Brakol"}) for seed in range(30)]
    assert len({other["temp_c"] for other in others}) > 10


def test_hotel_orders_are_reverses_and_hotels_can_be_booked():
    place = world()
    by_price = execute(place, "find_hotels", {"city": "Brakol", "sort": "price"})["hotels"]
    by_rating = execute(place, "find_hotels", {"city": "Brakol", "sort": "rating"})["hotels"]
    assert by_price == by_rating[::-1]
    assert by_price[0]["price"] < by_price[1]["price"]
    assert by_rating[0]["rating"] > by_rating[1]["rating"]
    assert all(is_held_out(hotel["name"]) for hotel in by_price)
    name = by_price[0]["name"]
    booked = execute(place, "book_hotel", {"hotel": name, "nights": 2, "room": "single"})
    assert set(booked) == {"code"}


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("fly", {}, "no tool fly"),
        ("get_weather", [], "arguments must be an object"),
        ("get_weather", {}, "missing argument city"),
        ("get_weather", {"city": 3}, "bad city"),
        ("get_weather", {"city": "Brakol", "unit": "C"}, "unknown argument unit"),
        ("get_weather", {"city": "Nowhere"}, "unknown city Nowhere"),
        ("find_hotels", {"city": "Brakol", "sort": "name"}, "bad sort"),
        ("find_hotels", {"city": "Nowhere", "sort": "price"}, "unknown city Nowhere"),
        ("book_hotel", {"hotel": "Kopra", "nights": "2", "room": "single"}, "bad nights"),
        ("book_hotel", {"hotel": "Kopra", "nights": True, "room": "single"}, "bad nights"),
        ("book_hotel", {"hotel": "Kopra", "nights": 99, "room": "single"}, "bad nights"),
        ("book_hotel", {"hotel": "Other", "nights": 2, "room": "single"}, "unknown hotel Other"),
        ("convert_money", {"amount": 2, "source": "AAA", "target": "EUR"}, "unknown currency AAA"),
    ],
)
def test_bad_calls_give_errors(name, arguments, problem):
    assert execute(world(), name, arguments) == {"error": problem}


def test_conversion_has_two_decimals():
    result = execute(world(), "convert_money", {"amount": 25, "source": "EUR", "target": "USD"})
    assert len(result["value"].split(".")[1]) == 2
    assert call_problem("convert_money", {"amount": 1, "source": "EUR", "target": "USD"}) is None
