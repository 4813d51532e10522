"""Probes that find the cause of a mismatch between an engine and the model that a trainer loads."""

from tokentrue.doctor.examine import examine
from tokentrue.doctor.findings import CAUSES, Finding, Report, Verdict
from tokentrue.doctor.reference import Reference
from tokentrue.doctor.routes import HttpRoutes, routes_for

__all__ = ["CAUSES", "Finding", "HttpRoutes", "Reference", "Report", "Verdict", "examine", "routes_for"]
