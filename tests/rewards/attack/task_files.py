"""Tasks with golds of several forms, as users' files have them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_THINGS = ("apples", "tickets", "books", "stamps", "bottles", "chairs", "letters", "coins")
_WHO = ("Mira", "Tom", "Adaeze", "Kenji", "Lucia", "Omar", "Ivy", "Pavel")
_REVIEWS = {
    "positive": ("The battery lasts two days and it charges fast.", "Best soup I had this year.", "Works as promised."),
    "negative": ("It broke after a week.", "The waiter ignored us for an hour.", "Too loud, and the lid leaks."),
    "neutral": ("It arrived on Tuesday.", "The box contains a cable and a manual.", "It is a lamp."),
    "mixed": ("Great screen, poor speakers.", "Good food, but far too expensive.", "Fast, yet it crashes often."),
}
_SYMBOLS = {
    "cobalt": "Co", "carbon monoxide": "CO", "hafnium": "Hf", "hydrogen fluoride": "HF", "nobelium": "No",
    "nitric oxide": "NO", "silicon": "Si", "polonium": "Po", "tin": "Sn", "copernicium": "Cn", "cyanide": "CN",
    "osmium": "Os", "scandium": "Sc", "sodium chloride": "NaCl", "potassium iodide": "KI", "copper": "Cu",
    "caesium": "Cs", "carbon disulfide": "CS2", "iron sulfide": "FeS", "zinc oxide": "ZnO", "tungsten carbide": "WC",
    "hydrogen": "H", "phosphorus": "P", "gold": "Au", "silver": "Ag", "lead sulfide": "PbS", "bismuth": "Bi",
    "boron nitride": "BN", "gallium arsenide": "GaAs", "titanium": "Ti",
}  # fmt: skip
_CITIES = {
    "France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima", "Norway": "Oslo", "Egypt": "Cairo",
    "Canada": "Ottawa", "Chile": "Santiago", "Vietnam": "Hanoi", "Poland": "Warsaw", "Iran": "Tehran", "Cuba": "Havana",
    "Ghana": "Accra", "Nepal": "Kathmandu", "Portugal": "Lisbon", "Turkey": "Ankara", "Mexico": "Mexico City",
    "Kuwait": "Kuwait City", "Finland": "Helsinki", "Austria": "Vienna", "Qatar": "Doha", "Senegal": "Dakar",
    "India": "New Delhi", "Greece": "Athens", "Ireland": "Dublin", "Hungary": "Budapest", "Iraq": "Baghdad",
    "Laos": "Vientiane", "Libya": "Tripoli", "Malta": "Valletta", "Oman": "Muscat", "Spain": "Madrid",
}  # fmt: skip
_LANGUAGES = ("Python", "Rust", "Go", "Java", "Ruby", "Scala", "Perl", "Haskell", "Julia", "Kotlin")
_COMPANIES = ("Noravil", "Kahudrax", "Milifen", "Vorestin", "Quandar", "Oblivar", "Tresimol", "Zandopril")
_CAUSES = ("dry mouth", "night sweats", "blue fingertips", "a mild rash", "loss of smell", "cold feet", "hiccups")


def _numbers(rng: random.Random) -> Iterator[tuple[str, Any]]:
    for index in range(40):
        a, b, c = rng.randint(3, 60), rng.randint(2, 40), rng.randint(2, 9)
        who, thing = rng.choice(_WHO), rng.choice(_THINGS)
        if index % 2:
            yield f"{who} has {a} {thing} and buys {c} boxes of {b}. How many {thing} are there now?", str(a + b * c)
        else:
            yield (
                f"{who} shares {a} {thing} equally among {c} friends and keeps {b}. How many is each friend given?",
                str(a // c),
            )


def _decimals(rng: random.Random) -> Iterator[tuple[str, Any]]:
    for _ in range(40):
        price, count, rate = rng.randint(110, 9900) / 100, rng.randint(2, 12), rng.choice((5, 8, 19, 21))
        total = price * count * (1 + rate / 100)
        yield (
            f"{count} items cost {price:.2f} each. What is the price with {rate}% tax, to two decimals?",
            round(total, 2),
        )


def _gsm(rng: random.Random) -> Iterator[tuple[str, Any]]:
    for _ in range(40):
        a, b, c = rng.randint(3, 60), rng.randint(2, 40), rng.randint(2, 9)
        text = f"There are {c} boxes of {b}: {b * c}. With {a} more it is {a}+{b * c}={a + b * c}.\n#### {a + b * c}"
        yield f"{rng.choice(_WHO)} has {a} coins and finds {c} boxes of {b} coins. How many are there?", text


def _labels(rng: random.Random) -> Iterator[tuple[str, Any]]:
    for index in range(40):
        label = rng.choice(list(_REVIEWS))
        yield f"Review {index}: {rng.choice(_REVIEWS[label])} Is it positive, negative, neutral or mixed?", label


def _choices(rng: random.Random) -> Iterator[tuple[str, Any]]:
    for country, city in _CITIES.items():
        options = rng.sample([other for other in _CITIES.values() if other != city], 3)
        options.insert(rng.randrange(4), city)
        listed = " ".join(f"({letter}) {option}" for letter, option in zip("ABCD", options, strict=True))
        yield f"What is the capital of {country}? {listed}", "ABCD"[options.index(city)]


def _symbols(rng: random.Random) -> Iterator[tuple[str, Any]]:
    for name, symbol in _SYMBOLS.items():
        yield f"What is the chemical symbol or formula of {name}?", symbol


def _cities(rng: random.Random) -> Iterator[tuple[str, Any]]:
    for country, city in _CITIES.items():
        yield f"What is the capital of {country}?", city


def _ranked(rng: random.Random) -> Iterator[tuple[str, Any]]:
    for index in range(30):
        rows = dict(zip(rng.sample(_LANGUAGES, 4), rng.sample(range(1, 99), 4), strict=True))
        said = ", ".join(f"{name} {votes}" for name, votes in rows.items())
        yield (
            f"Poll {index}: {said}. Rank the languages by votes, the most first.",
            sorted(rows, key=lambda n: -rows[n]),
        )


def _sets(rng: random.Random) -> Iterator[tuple[str, Any]]:
    for index in range(30):
        rows = dict(zip(rng.sample(_LANGUAGES, 6), rng.sample(range(1, 99), 6), strict=True))
        wanted = [name for name, votes in rows.items() if votes >= sorted(rows.values())[6 - rng.randint(3, 4)]]
        said = ", ".join(f"{name} {votes}" for name, votes in rows.items())
        least = min(rows[name] for name in wanted)
        yield f"Poll {index}: {said}. Which languages have at least {least} votes?", wanted


def _records(rng: random.Random) -> Iterator[tuple[str, Any]]:
    for index in range(30):
        record = {
            "customer": rng.choice(_WHO), "item": rng.choice(_THINGS), "count": rng.randint(2, 99),
            "city": rng.choice(list(_CITIES.values())), "paid": rng.random() < 0.5,
        }  # fmt: skip
        paid = "has paid" if record["paid"] else "has not paid"
        text = f"{record['customer']} from {record['city']} ordered {record['count']} {record['item']} and {paid}."
        yield f"Mail {index}: {text} Answer with JSON: customer, item, count, city, paid.", record


def _prose(rng: random.Random) -> Iterator[tuple[str, Any]]:
    for index in range(30):
        drug, (first, second), dose = rng.choice(_COMPANIES), rng.sample(_CAUSES, 2), rng.randint(2, 40) * 5
        question = f"Case {index}: What may {drug} cause, and what is its dose?"
        yield question, f"{drug} may cause {first} and {second}. The usual dose of {drug} is {dose} mg a day."


def _code(rng: random.Random) -> Iterator[tuple[str, Any]]:
    for index in range(24):
        a, b = rng.randint(2, 9), rng.randint(1, 20)
        kinds = (
            ("add", f"x * {a} + {b}", lambda x, a=a, b=b: x * a + b),
            ("cut", f"max(x - {b}, {a})", lambda x, a=a, b=b: max(x - b, a)),
        )
        name, body, function = kinds[index % 2]
        tests = [f"assert {name}_{index}({x}) == {function(x)}" for x in (0, 7, 30)]
        question = f"Write a Python function {name}_{index}(x) that returns {body.replace('x', 'its argument')}."
        yield question, {"code": f"def {name}_{index}(x):\n    return {body}", "tests": tests}


MAKERS = {
    "numbers": _numbers, "decimals": _decimals, "gsm": _gsm, "labels": _labels, "choices": _choices,
    "symbols": _symbols, "cities": _cities, "ranked": _ranked, "sets": _sets, "records": _records, "prose": _prose,
    "code": _code,
}  # fmt: skip


def write_tasks(name: str, folder: Path) -> Path:
    """Write the tasks ``name`` as JSON lines."""
    rows = []
    for index, (question, gold) in enumerate(MAKERS[name](random.Random(name))):
        row = {"id": f"{name}-{index}", "question": question, "answer": gold}
        if name == "code":
            row |= {"answer": gold["code"], "tests": gold["tests"]}
        rows.append(row)
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file
