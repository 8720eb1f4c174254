"""Keys of an issuer, and tokens that they have signed."""

from __future__ import annotations

import json
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

NOW_S = 1_800_000_000.0
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())


def jwk(key: Any, kid: str | None, **more: str) -> dict[str, Any]:
    algorithm = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
    made: dict[str, Any] = json.loads(algorithm.to_jwk(key.public_key()))
    return made | ({} if kid is None else {"kid": kid}) | more


def jwks(*keys: dict[str, Any]) -> bytes:
    return json.dumps({"keys": keys}).encode()


def token(key: Any = RSA_KEY, kid: str | None = "one", algorithm: str = "RS256", **claims: Any) -> bytes:
    said = {"iss": "https://id.example", "aud": "fleet", "exp": NOW_S + 60, "tenant": "acme"} | claims
    headers = {} if kid is None else {"kid": kid}
    return jwt.encode({name: each for name, each in said.items() if each is not None}, key, algorithm, headers).encode()
