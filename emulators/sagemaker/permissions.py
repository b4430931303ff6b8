"""What the job's role may do, as far as a launcher asks: SimulatePrincipalPolicy, and reads and writes that fail."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from xml.sax.saxutils import escape

NAMESPACE = "https://iam.amazonaws.com/doc/2010-05-08/"


class Denied(set[str]):
    """Actions that the role may not do, as patterns such as `s3:Put*`."""

    def __contains__(self, action: object) -> bool:
        return any(fnmatch.fnmatchcase(str(action).lower(), pattern.lower()) for pattern in self)


def simulated(denied: Denied, actions: Iterable[str], resources: Iterable[str]) -> str:
    """The answer to SimulatePrincipalPolicy: an XML document with one result for each action and resource."""
    results = [
        f"<member><EvalActionName>{escape(action)}</EvalActionName>"
        f"<EvalResourceName>{escape(resource)}</EvalResourceName>"
        f"<EvalDecision>{'implicitDeny' if action in denied else 'allowed'}</EvalDecision></member>"
        for action in actions
        for resource in (list(resources) or ["*"])
    ]
    return (
        f'<SimulatePrincipalPolicyResponse xmlns="{NAMESPACE}"><SimulatePrincipalPolicyResult>'
        f"<IsTruncated>false</IsTruncated><EvaluationResults>{''.join(results)}</EvaluationResults>"
        "</SimulatePrincipalPolicyResult><ResponseMetadata><RequestId>emulated</RequestId></ResponseMetadata>"
        "</SimulatePrincipalPolicyResponse>"
    )
