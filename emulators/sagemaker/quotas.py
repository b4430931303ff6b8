"""Quotas of an account, and the part of the Service Quotas API through which clients read them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, MutableMapping
from typing import Any

from isthmus.emulators.sagemaker.errors import ServiceError
from isthmus.emulators.sagemaker.shapes import service_model

ON_DEMAND = "training job usage"
SPOT = "spot training job usage"
WARM_POOL = "training warm pool usage"
USUAL = 64
"""Of on-demand and spot, unless a test says otherwise. A new account has 0 for most GPU types."""


def name_of(instance_type: str, usage: str) -> str:
    """A quota's name, such as "ml.p4d.24xlarge for spot training job usage"."""
    return f"{instance_type} for {usage}"


def code_of(name: str) -> str:
    """A quota's code. The service's own are arbitrary: clients must find quotas by name."""
    return f"L-{hashlib.sha256(name.encode()).hexdigest()[:8].upper()}"


class Quotas(MutableMapping[str, int]):
    """Quota name -> instances. Setting a bare instance type sets its on-demand and its spot quota."""

    def __init__(self) -> None:
        self._set: dict[str, int] = {}

    def __getitem__(self, key: str) -> int:
        if " for " not in key:
            key = name_of(key, ON_DEMAND)
        # Warm pools have to be asked for: their default is 0 everywhere.
        return self._set.get(key, 0 if key.endswith(WARM_POOL) else USUAL)

    def __setitem__(self, key: str, value: int) -> None:
        for name in [key] if " for " in key else [name_of(key, usage) for usage in (ON_DEMAND, SPOT)]:
            self._set[name] = value

    def __delitem__(self, key: str) -> None:
        for name in [key] if " for " in key else [name_of(key, usage) for usage in (ON_DEMAND, SPOT)]:
            del self._set[name]

    def __iter__(self) -> Iterator[str]:
        request = service_model().operation_model("CreateTrainingJob").input_shape
        types = request.members["ResourceConfig"].members["InstanceType"].enum
        for usage in (ON_DEMAND, SPOT, WARM_POOL):
            yield from (name_of(instance_type, usage) for instance_type in types)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def answer(self, operation: str, request: dict[str, Any], region: str, account: str) -> dict[str, Any]:
        """The answer to an operation of the Service Quotas API about SageMaker.

        Raises:
            ServiceError: NoSuchResourceException, or an operation that is not emulated.
        """
        default = "AWSDefault" in operation

        def described(name: str) -> dict[str, Any]:
            value = USUAL if default and not name.endswith(WARM_POOL) else 0 if default else self[name]
            return {
                "ServiceCode": "sagemaker",
                "ServiceName": "Amazon SageMaker",
                "QuotaArn": f"arn:aws:servicequotas:{region}:{account}:sagemaker/{code_of(name)}",
                "QuotaCode": code_of(name),
                "QuotaName": name,
                "Value": float(value),
                "Unit": "None",
                "Adjustable": True,
                "GlobalQuota": False,
            }

        if operation in ("GetServiceQuota", "GetAWSDefaultServiceQuota"):
            for name in self:
                if code_of(name) == request.get("QuotaCode"):
                    return {"Quota": described(name)}
            raise ServiceError(
                "NoSuchResourceException", "The request failed because the quota does not exist."
            )
        if operation in ("ListServiceQuotas", "ListAWSDefaultServiceQuotas"):
            names, start = list(self), int(request.get("NextToken") or 0)
            end = start + min(int(request.get("MaxResults") or 100), 100)
            page: dict[str, Any] = {"Quotas": [described(name) for name in names[start:end]]}
            return {**page, "NextToken": str(end)} if end < len(names) else page
        raise ServiceError("InternalFailure", f"{operation} of Service Quotas is not emulated.")
