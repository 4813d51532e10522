"""Probes that find the cause of a mismatch between an engine and the model that a trainer loads."""

from tokentrue.doctor.examine import examine
from tokentrue.doctor.findings import CAUSES, DoctorReport, Finding, Verdict
from tokentrue.doctor.reference import Reference
from tokentrue.doctor.routes import HttpRoutes, routes_for

__all__ = ["CAUSES", "DoctorReport", "Finding", "HttpRoutes", "Reference", "Verdict", "examine", "routes_for"]
