"""Contexts and dependencies of agents: what ``--agent-context`` names."""

import datetime
import sqlite3


def airline(task):
    """The airline demo's."""
    from airline.context import AirlineAgentChatContext, create_initial_context
    from chatkit.types import ThreadMetadata
    from memory_store import MemoryStore

    thread = ThreadMetadata(id=task.id, created_at=datetime.datetime.now())
    return AirlineAgentChatContext(
        state=create_initial_context(), request_context={}, thread=thread, store=MemoryStore()
    )


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


def advice(result):
    """The answer of bank support, one of three fields."""
    return result.output.support_advice
