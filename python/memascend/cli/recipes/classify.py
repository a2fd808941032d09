"""Classification: texts with a label each, and a new head over as many classes as there are labels."""

from __future__ import annotations

from typing import Any

from memascend.errors import DataError

#: More labels are rather numbers to be predicted.
LABELS_MAX = 1000


def trainer_of(trainer_class: type, rows: Any) -> tuple[type, dict[Any, int]]:
    """Return the trainer for the labels of `rows`, and the number of each label, in their order."""
    labels = sorted(set(rows["label"]), key=lambda label: (str(type(label)), label))
    if len(labels) < 2 or None in labels:
        raise DataError("--task classify takes a label for each text, of 2 classes at least")
    if len(labels) > LABELS_MAX:
        raise DataError(f"--data has {len(labels)} labels, and --task classify takes {LABELS_MAX} classes at most")
    names = {number: str(label) for number, label in enumerate(labels)}
    opened = {
        "model_class": "AutoModelForSequenceClassification",
        "num_labels": len(labels),
        "id2label": names,
        "label2id": {name: number for number, name in names.items()},
    }
    classifier = type("Classifier", (trainer_class,), {"_opened_as": opened})
    return classifier, {label: number for number, label in enumerate(labels)}


def labelled(rows: Any, labels: dict[Any, int], tokenizer: Any, tokens: int) -> Any:
    """Return rows of token ids and numbers of classes, of at most so many tokens. None stays None."""
    if rows is None:
        return None

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        if row["label"] not in labels:
            raise DataError(f"--eval has the label {row['label']!r}, which --data has not")
        return dict(tokenizer(row["text"], truncation=True, max_length=tokens)) | {"labels": labels[row["label"]]}

    return rows.map(encode, remove_columns=rows.column_names)
