"""A text-to-SQL program of DSPy: write a query, correct it if it fails."""

import sqlite3

import dspy

dspy.configure(lm=dspy.LM("openai/gpt-5-mini"))


class WriteSQL(dspy.Signature):
    """Answer a question about a SQLite database with one query."""

    tables: str = dspy.InputField()
    question: str = dspy.InputField()
    sql: str = dspy.OutputField()


class CorrectSQL(dspy.Signature):
    """Correct a SQLite query that fails."""

    tables: str = dspy.InputField()
    question: str = dspy.InputField()
    failed_sql: str = dspy.InputField()
    error: str = dspy.InputField()
    sql: str = dspy.OutputField()


class TextToSQL(dspy.Module):
    def __init__(self):
        super().__init__()
        self.write = dspy.Predict(WriteSQL)
        self.correct = dspy.Predict(CorrectSQL)

    def forward(self, question: str, db_path: str) -> dspy.Prediction:
        with sqlite3.connect(f"file:{db_path}?mode=ro", uri=True) as db:
            ddl = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()
            tables = "\n".join(statement for (statement,) in ddl)
            draft = self.write(tables=tables, question=question)
            try:
                db.execute(draft.sql)
            except (sqlite3.Error, sqlite3.Warning) as error:
                return self.correct(tables=tables, question=question, failed_sql=draft.sql, error=str(error))
        return draft


program = TextToSQL()
