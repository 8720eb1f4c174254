"""The second front door: an endpoint picker, which Envoy asks by external processing where each request goes."""
