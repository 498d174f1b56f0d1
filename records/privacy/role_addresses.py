"""Addresses that belong to no person: of roles and vendors, and of domains kept for examples."""

from __future__ import annotations

ROLES = frozenset(
    (
        "abuse",
        "accounts",
        "admin",
        "administrator",
        "alerts",
        "billing",
        "bot",
        "bots",
        "careers",
        "ci",
        "contact",
        "customercare",
        "customerservice",
        "daemon",
        "donotreply",
        "enquiries",
        "feedback",
        "git",
        "hello",
        "help",
        "helpdesk",
        "hostmaster",
        "hr",
        "info",
        "inquiries",
        "jobs",
        "legal",
        "mail",
        "mailer-daemon",
        "marketing",
        "media",
        "news",
        "newsletter",
        "nobody",
        "noreply",
        "notification",
        "notifications",
        "office",
        "orders",
        "postmaster",
        "press",
        "privacy",
        "root",
        "sales",
        "security",
        "service",
        "spam",
        "subscribe",
        "support",
        "team",
        "unsubscribe",
        "webmaster",
        "www",
    )
)
"""The parts before the @ that name a role (RFC 2142, and those that vendors use)."""
EXAMPLES = ("example.com", "example.net", "example.org")
RESERVED = ("example", "test", "invalid", "localhost")
"""Domains and top-level domains that belong to nobody (RFC 2606)."""


def is_nobodys(address: str) -> bool:
    """Whether an e-mail address belongs to a role, or to a domain for examples."""
    local, _, domain = address.lower().rpartition("@")
    local = local.partition("+")[0]
    if local in ROLES or local.replace("-", "").replace("_", "").replace(".", "") in ROLES:
        return True
    return domain.rpartition(".")[2] in RESERVED or any(
        domain == example or domain.endswith(f".{example}") for example in EXAMPLES
    )
