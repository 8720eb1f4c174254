{{/*
What the schema cannot say in words. Values are kept where many can read them (Helm's release Secrets, git, `helm get
values`), so secrets among them are refused, wherever they could be written.
*/}}

{{/* Settings that are secrets, by their name in the settings file, with how each reaches the processes instead. */}}
{{- define "dualmap.secretSettings" -}}
admin_key: name a Secret in keys.admin
api_keys: name a Secret in keys.api
upstream_api_key: name a Secret in keys.upstream
tenant_cache_secret: name a Secret in keys.tenantCache
record_salt: name a Secret in keys.recordSalt
webhook_secret: set DUALMAP_POOLS, the list of pools as JSON, from a Secret in workers.extraEnv
key: give the key's sha256 in its place, or the whole list as JSON in a Secret that keys.tenants or keys.admins names
{{- end -}}

{{/* A password in a URL: USER:PASSWORD@ or an option that ends in password=, unless the kubelet fills it in: $(NAME). */}}
{{- define "dualmap.passwordInUrl" -}}
://[^/?#\s]*:([^$@/?#\s]|\$[^(])[^/?#\s]*@|[?&][a-z_]*password=([^$&\s]|\$[^(])
{{- end -}}

{{/* Adds the secrets in a part of the settings to "found": dict "value" "at" "advice" "found". */}}
{{- define "dualmap.secretsIn" -}}
{{- $part := . -}}
{{- if kindIs "map" .value -}}
  {{- range $name, $value := .value -}}
    {{- $at := printf "%s.%s" $part.at $name -}}
    {{- if and $value (hasKey $part.advice $name) -}}
      {{- $_ := set $part.found "list" (append $part.found.list (printf "%s is a secret, and values are no place for one: %s" $at (get $part.advice $name))) -}}
    {{- else -}}
      {{- include "dualmap.secretsIn" (merge (dict "value" $value "at" $at) (omit $part "value" "at")) -}}
    {{- end -}}
  {{- end -}}
{{- else if kindIs "slice" .value -}}
  {{- range $number, $value := .value -}}
    {{- include "dualmap.secretsIn" (dict "value" $value "at" (printf "%s[%d]" $part.at $number) "advice" $part.advice "found" $part.found) -}}
  {{- end -}}
{{- else if and (kindIs "string" .value) (regexMatch (include "dualmap.passwordInUrl" .) .value) -}}
  {{- $_ := set .found "list" (append .found.list (printf "%s has a password in its URL, and values are no place for one: leave it out" .at)) -}}
{{- end -}}
{{- end -}}

{{/* Adds the secrets in the variables and flags of a process to "found": dict "values" "at" "advice" "found". */}}
{{- define "dualmap.secretsOfProcess" -}}
{{- $part := . -}}
{{- $inText := printf "(^|[^a-z0-9_])(%s)[\"']?\\s*:\\s*[\"'\\[]*[^\\s\"'$\\[\\]]" (keys .advice | sortAlpha | join "|") -}}
{{- range .values.extraEnv -}}
  {{- $value := .value | default "" | toString -}}
  {{- $name := .name | lower | splitList "__" | last -}}
  {{- $secret := and (hasPrefix "DUALMAP_" .name) (hasKey $part.advice $name) (not (hasPrefix "$(" $value)) -}}
  {{- if and $value (or $secret (regexMatch $inText $value) (regexMatch (include "dualmap.passwordInUrl" .) $value)) -}}
    {{- $_ := set $part.found "list" (append $part.found.list (printf "%s.extraEnv: %s holds a secret: take it from a Secret, by valueFrom.secretKeyRef in place of value" $part.at .name)) -}}
  {{- end -}}
{{- end -}}
{{- range .values.extraArgs -}}
  {{- $word := toString . -}}
  {{- $flag := $word | splitList "=" | first -}}
  {{- $name := $flag | trimPrefix "--" | replace "-" "_" | splitList "." | last -}}
  {{- $secret := and (hasPrefix "--" $flag) (hasKey $part.advice $name) (not (hasPrefix (printf "%s=$(" $flag) $word)) -}}
  {{- if or $secret (regexMatch $inText $word) (regexMatch (include "dualmap.passwordInUrl" .) $word) -}}
    {{- $_ := set $part.found "list" (append $part.found.list (printf "%s.extraArgs: %s holds a secret: take it from a Secret, as a variable of %s.extraEnv" $part.at $flag $part.at)) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/* Why these values cannot be installed, a line for each reason; empty if nothing is wrong. */}}
{{- define "dualmap.complaints" -}}
{{- $found := dict "list" list -}}
{{- $advice := include "dualmap.secretSettings" . | fromYaml -}}
{{- $pools := list -}}
{{- range .Values.fleet.pools }}{{ $pools = append $pools (.name | default "default") }}{{ end -}}

{{- if dig "store" "url" "" .Values.fleet -}}
  {{- $_ := set $found "list" (append $found.list "fleet.store.url is not read: set store.url, or store.urlSecret") -}}
{{- end -}}
{{- $fleet := omit .Values.fleet "store" -}}
{{- $_ := set $fleet "store" (omit (.Values.fleet.store | default dict) "url") -}}
{{- include "dualmap.secretsIn" (dict "value" $fleet "at" "fleet" "advice" $advice "found" $found) -}}
{{- if regexMatch (include "dualmap.passwordInUrl" .) .Values.store.url -}}
  {{- $_ := set $found "list" (append $found.list "store.url has a password in it, and values are no place for one: write $(STORE_PASSWORD) in its place and name a Secret in store.passwordSecret, or the whole URL's Secret in store.urlSecret") -}}
{{- end -}}
{{- range $name := list "routers" "workers" "pickers" -}}
  {{- include "dualmap.secretsOfProcess" (dict "values" (index $.Values $name) "at" $name "advice" $advice "found" $found) -}}
{{- end -}}
{{- range $engine := .Values.engines -}}
  {{- $at := printf "engines %q" $engine.name -}}
  {{- if regexMatch "--api-key(=|\\s+)([^$\\s]|\\$[^(])" (concat ($engine.command | default list) ($engine.args | default list) | join " ") -}}
    {{- $_ := set $found "list" (append $found.list (printf "%s: --api-key is a secret: leave it out, and set VLLM_API_KEY in env from a Secret, by valueFrom.secretKeyRef" $at)) -}}
  {{- end -}}
  {{- range $engine.env -}}
    {{- if and (eq .name "VLLM_API_KEY") .value -}}
      {{- $_ := set $found "list" (append $found.list (printf "%s: VLLM_API_KEY is a secret: take it from a Secret, by valueFrom.secretKeyRef in place of value" $at)) -}}
    {{- end -}}
  {{- end -}}
  {{- if not (has ($engine.pool | default "default") $pools) -}}
    {{- $_ := set $found "list" (append $found.list (printf "%s serve pool %q, which fleet.pools does not have: it has %s" $at ($engine.pool | default "default") (join ", " $pools))) -}}
  {{- end -}}
{{- end -}}
{{- if and .Values.keys.tenants.secretName .Values.fleet.tenants -}}
  {{- $_ := set $found "list" (append $found.list "keys.tenants and fleet.tenants are both set, and one would hide the other: keep one") -}}
{{- end -}}
{{- if and .Values.keys.admins.secretName .Values.fleet.router.admins -}}
  {{- $_ := set $found "list" (append $found.list "keys.admins and fleet.router.admins are both set, and one would hide the other: keep one") -}}
{{- end -}}

{{- $router := .Values.fleet.router | default dict -}}
{{- $clients := or .Values.keys.api.secretName .Values.keys.tenants.secretName $router.api_keys $router.needs_key $router.jwt $router.gateway .Values.fleet.tenants -}}
{{- $operators := or .Values.keys.admin.secretName .Values.keys.admins.secretName $router.admin_key $router.admins $router.open_admin -}}
{{- if and $clients (not $operators) -}}
  {{- $_ := set $found "list" (append $found.list "clients need keys, and /admin needs none, so routers would not start: name a Secret by keys.admin.secretName, or set fleet.router.open_admin") -}}
{{- end -}}

{{- range $name, $_ := .Values.commonLabels -}}
  {{- if regexMatch "^(app\\.kubernetes\\.io/(name|instance|component|version|managed-by)|helm\\.sh/chart|dualmap/.*)$" $name -}}
    {{- $_ := set $found "list" (append $found.list (printf "commonLabels may not set %s, which is the chart's own: choose another name" $name)) -}}
  {{- end -}}
{{- end -}}

{{- with .Values.ingress -}}{{- if .enabled -}}
  {{- if not .hosts -}}
    {{- $_ := set $found "list" (append $found.list "ingress is enabled without hosts, and would lead nowhere: name them in ingress.hosts, as [llm.example]") -}}
  {{- end -}}
  {{- if not .paths -}}
    {{- $_ := set $found "list" (append $found.list "ingress is enabled without paths, and would lead nowhere: name them in ingress.paths, as [/v1]") -}}
  {{- end -}}
{{- end -}}{{- end -}}
{{- with .Values.httpRoute -}}{{- if .enabled -}}
  {{- if not .parentRefs -}}
    {{- $_ := set $found "list" (append $found.list "httpRoute is enabled without parents, and no gateway would take it: name the gateway in httpRoute.parentRefs, as [{name: gateway, namespace: gateways}]") -}}
  {{- end -}}
  {{- if not .paths -}}
    {{- $_ := set $found "list" (append $found.list "httpRoute is enabled without paths, and would publish everything, /admin too: name them in httpRoute.paths, as [/v1]") -}}
  {{- end -}}
  {{- if and (eq .backend "inferencePool") (not $.Values.inferencePool.enabled) -}}
    {{- $_ := set $found "list" (append $found.list "httpRoute.backend is inferencePool, which there is not: set inferencePool.enabled") -}}
  {{- end -}}
{{- end -}}{{- end -}}
{{- with .Values.inferencePool -}}{{- if .enabled -}}
  {{- if not $.Values.pickers.enabled -}}
    {{- $_ := set $found "list" (append $found.list "inferencePool is enabled without pickers, whom the gateway asks: set pickers.enabled") -}}
  {{- end -}}
  {{- if not (has .pool $pools) -}}
    {{- $_ := set $found "list" (append $found.list (printf "inferencePool.pool is %q, which fleet.pools does not have: it has %s" .pool (join ", " $pools))) -}}
  {{- end -}}
{{- end -}}{{- end -}}
{{- join "\n" $found.list -}}
{{- end -}}
