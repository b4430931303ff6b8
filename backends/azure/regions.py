"""The regions of Azure's public cloud, to tell a misspelt name from one without being asked."""

from __future__ import annotations

from difflib import get_close_matches

_NAMES = (
    "australiacentral australiacentral2 australiaeast australiasoutheast austriaeast belgiumcentral brazilsouth "
    "brazilsoutheast canadacentral canadaeast centralindia centralus chilecentral denmarkeast eastasia eastus eastus2 "
    "francecentral francesouth germanynorth germanywestcentral indonesiacentral israelcentral italynorth japaneast "
    "japanwest jioindiacentral jioindiawest koreacentral koreasouth malaysiawest mexicocentral newzealandnorth "
    "northcentralus northeurope norwayeast norwaywest polandcentral qatarcentral southafricanorth southafricawest "
    "southcentralus southeastasia southindia spaincentral swedencentral swedensouth switzerlandnorth switzerlandwest "
    "uaecentral uaenorth uksouth ukwest westcentralus westeurope westindia westus westus2 westus3"
)
REGIONS = frozenset(_NAMES.split())
"""Microsoft's list of regions (learn.microsoft.com/azure/reliability/regions-list). The cost estimates have the same ones by
geography; a test compares them."""


def unknown(region: str) -> str | None:
    """What to say of a region that is not in the list; None of one that is."""
    if region in REGIONS:
        return None
    plain = "".join(region.lower().split()).replace("-", "")
    near = get_close_matches(plain, sorted(REGIONS), n=1, cutoff=0.7)
    return f"Azure has no region {region}" + (f" (did you mean {near[0]}?)" if near else "")
