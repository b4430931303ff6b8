"""ListTrainingJobs and Search: filters, order, pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isthmus.emulators.sagemaker.errors import ValidationException
from isthmus.emulators.sagemaker.job import TrainingJob

SORT = {"CreationTime": "CreationTime", "Name": "TrainingJobName", "Status": "TrainingJobStatus"}


def page(items: Sequence[Any], request: dict[str, Any], key: str, usual: int) -> dict[str, Any]:
    """One page of a list, with a token for the next where there is one."""
    token = request.get("NextToken") or "0"
    if not token.isdigit():
        raise ValidationException("Invalid pagination token.")
    start, size = int(token), int(request.get("MaxResults") or usual)
    answer: dict[str, Any] = {key: list(items[start : start + size])}
    return {**answer, "NextToken": str(start + size)} if start + size < len(items) else answer


def list_jobs(jobs: Sequence[TrainingJob], request: dict[str, Any]) -> dict[str, Any]:
    """ListTrainingJobs: newest first unless asked otherwise, ten a page."""
    found = [summary for summary in (job.summary() for job in jobs) if _listed(summary, request)]
    found.sort(key=lambda one: one[SORT[request.get("SortBy", "CreationTime")]])
    if request.get("SortOrder", "Descending") == "Descending":
        found.reverse()
    return page(found, request, "TrainingJobSummaries", 10)


def _listed(summary: dict[str, Any], request: dict[str, Any]) -> bool:
    for field in ("CreationTime", "LastModifiedTime"):
        if (
            not request.get(f"{field}After", 0)
            <= summary[field]
            <= request.get(f"{field}Before", float("inf"))
        ):
            return False
    pool = summary.get("WarmPoolStatus", {}).get("Status")
    return (
        request.get("NameContains", "").lower() in summary["TrainingJobName"].lower()
        and request.get("StatusEquals") in (None, summary["TrainingJobStatus"])
        and request.get("WarmPoolStatusEquals") in (None, pool)
        and request.get("TrainingPlanArnEquals") in (None, summary.get("TrainingPlanArn"))
    )


def search(jobs: Sequence[TrainingJob], request: dict[str, Any]) -> dict[str, Any]:
    """Search with Resource=TrainingJob: filters over the description and `Tags.<key>`."""
    found = []
    for job in jobs:
        document = {**job.describe(), "Tags": list(job.tags)}
        if _matches(document, request.get("SearchExpression") or {}):
            found.append(document)
    found.sort(key=lambda one: str(_value(one, request.get("SortBy") or "CreationTime")))
    if request.get("SortOrder", "Descending") == "Descending":
        found.reverse()
    answer = page([{"TrainingJob": one} for one in found], request, "Results", 100)
    return {**answer, "TotalHits": {"Value": len(found), "Relation": "EqualTo"}}


def _matches(document: dict[str, Any], expression: dict[str, Any]) -> bool:
    if expression.get("NestedFilters"):
        raise ValidationException("NestedFilters are not emulated.")
    results = [_fits(document, one) for one in expression.get("Filters", [])]
    results += [_matches(document, inner) for inner in expression.get("SubExpressions", [])]
    return any(results) if results and expression.get("Operator") == "Or" else all(results)


def _value(document: dict[str, Any], name: str) -> Any:
    """A property by its dotted name; a tag by its key, dots and all. None where it is not there."""
    if name.startswith("Tags."):
        wanted = name.removeprefix("Tags.")
        return next((tag["Value"] for tag in document["Tags"] if tag["Key"] == wanted), None)
    value: Any = document
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _fits(document: dict[str, Any], one: dict[str, Any]) -> bool:
    there = _value(document, one["Name"])
    wanted = str(one.get("Value", ""))
    operator = str(one.get("Operator", "Equals"))
    if operator in ("Exists", "NotExists"):
        exists: bool = there is not None
        return exists == (operator == "Exists")
    if operator == "NotEquals":
        return str(there) != wanted
    if there is None:
        return False
    if operator == "Equals":
        return str(there) == wanted
    if operator == "Contains":
        return wanted in str(there)
    if operator == "In":
        return str(there) in wanted.split(",")
    left, right = _comparable(there), _comparable(wanted)
    orders: dict[str, bool] = {
        "GreaterThan": left > right,
        "GreaterThanOrEqualTo": left >= right,
        "LessThan": left < right,
        "LessThanOrEqualTo": left <= right,
    }
    return orders[operator]


def _comparable(value: Any) -> float:
    """A number or a time (seconds since 1970)."""
    from datetime import UTC, datetime

    try:
        return float(value)
    except ValueError:
        moment = datetime.fromisoformat(str(value))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
