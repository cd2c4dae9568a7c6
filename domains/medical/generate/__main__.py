"""The bundled data: ``python -m domains.medical.generate --out DIR [--seed N]``.

Real drug labels may not be redistributed, and invented facts about real drugs would be dangerous. So all of it is
obvious fiction: the drugs, ingredients and diseases do not exist. Nothing in it is medical advice.

The same seed gives the same rows and questions.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from groundwire.domains.medical.generate.facts import make_medicine, write
from groundwire.domains.medical.generate.lexicon import LANGUAGES
from groundwire.domains.medical.generate.questions import about_disease, about_drug

__all__ = ["NOTICE", "generate"]

NOTICE = """\
Everything in this folder is fiction, written by `python -m domains.medical.generate`: no drug, ingredient or disease in
it exists, and nothing in it is medical advice. It is for training and testing question answering over a database.

`medical.sqlite` has the tables drugs_info and disease, a row for each language; `questions.parquet` has id, question,
answer, language, hardness and split.
"""


def generate(out: Path, *, seed: int = 0) -> dict[str, int]:
    """Write ``medical.sqlite``, ``questions.parquet`` and a notice to ``out``; returns the questions of each split."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(seed)
    medicine = make_medicine(rng)
    rows: list[dict[str, Any]] = []
    for split, part in medicine.items():
        asked = [
            question
            for about, entities in ((about_drug, part.drugs), (about_disease, part.diseases))
            for entity in entities
            for language in LANGUAGES
            for question in about(rng, entity, part, language)
        ]
        unique = list({question.text: question for question in asked}.values())
        rng.shuffle(unique)  # so that the first n are a fair sample
        rows += [
            {
                "id": f"{split}-{number:04}",
                "question": question.text,
                "answer": question.answer,
                "language": question.language,
                "hardness": question.hardness,
                "split": split,
            }
            for number, question in enumerate(unique)
        ]
    out.mkdir(parents=True, exist_ok=True)
    write(medicine.values(), out / "medical.sqlite")
    pq.write_table(pa.Table.from_pylist(rows), out / "questions.parquet", compression="zstd")
    (out / "NOTICE.md").write_text(NOTICE, encoding="utf-8")
    return dict(Counter(row["split"] for row in rows))


if __name__ == "__main__":
    import typer

    from groundwire.tools.terminal import Version

    def main(
        out: Annotated[Path, typer.Option(help="The folder to write")],
        seed: Annotated[int, typer.Option(help="Another seed, other data")] = 0,
        version: Version = False,
    ) -> None:
        """Generate fictional medical data."""
        counts = generate(out, seed=seed)
        typer.echo(f"{out}: {', '.join(f'{name} {count}' for name, count in counts.items())}")

    typer.run(main)
