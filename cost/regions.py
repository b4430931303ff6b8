"""The regions of both clouds by geography, for filters such as `--region eu` and to tell a wrong name from an unpriced one."""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.errors import UsageError

_AZURE = {
    "us": "centralus eastus eastus2 northcentralus southcentralus westcentralus westus westus2 westus3",
    "eu": "austriaeast belgiumcentral denmarkeast francecentral francesouth germanynorth germanywestcentral italynorth "
    "northeurope norwayeast norwaywest polandcentral spaincentral swedencentral swedensouth switzerlandnorth "
    "switzerlandwest uksouth ukwest westeurope",
    "asia": "australiacentral australiacentral2 australiaeast australiasoutheast centralindia eastasia indonesiacentral "
    "japaneast japanwest jioindiacentral jioindiawest koreacentral koreasouth malaysiawest newzealandnorth southindia "
    "southeastasia westindia",
    "americas": "brazilsouth brazilsoutheast canadacentral canadaeast chilecentral mexicocentral",
    "middle-east": "israelcentral qatarcentral uaecentral uaenorth",
    "africa": "southafricanorth southafricawest",
}
_AWS = {
    "us": "us-east-1 us-east-2 us-west-1 us-west-2 us-gov-east-1 us-gov-west-1",
    "eu": "eu-central-1 eu-central-2 eu-north-1 eu-south-1 eu-south-2 eu-west-1 eu-west-2 eu-west-3",
    "asia": "ap-east-1 ap-east-2 ap-northeast-1 ap-northeast-2 ap-northeast-3 ap-south-1 ap-south-2 ap-southeast-1 "
    "ap-southeast-2 ap-southeast-3 ap-southeast-4 ap-southeast-5 ap-southeast-6 ap-southeast-7",
    "americas": "ca-central-1 ca-west-1 mx-central-1 sa-east-1",
    "middle-east": "il-central-1 me-central-1 me-south-1",
    "africa": "af-south-1",
}
GEOGRAPHIES = tuple(_AZURE)
REGIONS: dict[str, dict[str, str]] = {
    cloud: {region: geography for geography, names in table.items() for region in names.split()}
    for cloud, table in (("azure", _AZURE), ("sagemaker", _AWS), ("ec2", _AWS))
}
"""Cloud -> region -> geography."""


def geography(backend: str, region: str) -> str | None:
    """`us`, `eu` (Europe, also outside the union), `asia`, ...; None of an unknown region."""
    return REGIONS.get(backend, {}).get(region)


def check_region(backend: str, region: str, priced: Iterable[str] = (), *, where: str = "--region") -> None:
    """Raises UsageError when a region is none of the backend's, nor among those that somebody prices."""
    from difflib import get_close_matches

    known = {*REGIONS.get(backend, {}), *priced}
    if region in known or not known:
        return
    close = get_close_matches(region, sorted(known), n=1, cutoff=0.7)
    hint = f"did you mean {close[0]}?" if close else "`isthmus prices show` lists those with prices"
    raise UsageError(f"{backend} has no region {region!r}", where=where, hint=hint)
