"""Contexts and dependencies of agents: what ``--agent-context`` names."""

import datetime
import sqlite3


def airline(task):
    """The airline demo's."""
    from airline.context import AirlineAgentChatContext, create_initial_context

    return AirlineAgentChatContext(state=create_initial_context(), request_context={}, thread=None, store=None)


def bank(task):
    """Pydantic AI's bank support, whose main block makes a database and the global cursor."""
    import pydantic_ai_examples.bank_support as bank

    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.execute("CREATE TABLE customers(id, name, balance)")
    connection.execute("INSERT INTO customers VALUES (123, 'John', 123.45)")
    bank.cur = connection.cursor()
    return bank.SupportDependencies(customer_id=task.customer_id, db=bank.DatabaseConn(sqlite_conn=connection))


def flight(task):
    """Pydantic AI's flight booking."""
    import pydantic_ai_examples.flight_booking as booking

    day = datetime.date(2025, 1, 10)
    return booking.Deps(web_page_text=booking.flights_web_page, req_origin="SFO", req_destination="ANC", req_date=day)


def roulette(task):
    """Pydantic AI's roulette wheel."""
    from pydantic_ai_examples.roulette_wheel import Deps

    return Deps(winning_number=18)
