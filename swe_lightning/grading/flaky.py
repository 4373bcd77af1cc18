"""Published tasks whose gold patch is known not to pass every time, and why. Marked in reports, never left out unseen.

The requests tasks talk to httpbin.org, which a box without network cannot reach and a busy service answers with
errors; the astropy ones break with the library versions in their published images.
"""

from __future__ import annotations

_HTTPBIN = "its tests need httpbin.org"
_VERSIONS = "its tests do not fit the library versions of the published image"

KNOWN_FLAKY = {
    "psf__requests-863": _HTTPBIN,
    "psf__requests-1724": _HTTPBIN,
    "psf__requests-1766": _HTTPBIN,
    "psf__requests-1921": _HTTPBIN,
    "psf__requests-2317": _HTTPBIN,
    "astropy__astropy-7606": _VERSIONS,
    "astropy__astropy-8707": _VERSIONS,
    "astropy__astropy-8872": _VERSIONS,
}


def why_flaky(instance_id: str) -> str | None:
    return KNOWN_FLAKY.get(instance_id)
