{{/* Names and labels. An object is NAME-COMPONENT; the component's pods are selected by name, instance and component. */}}

{{- define "dualmap.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "dualmap.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "dualmap.labels" -}}
{{ include "dualmap.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | quote }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Further labels of pods, those of "labels" over the common ones: dict "root" "labels". */}}
{{- define "dualmap.podLabels" -}}
{{- with merge dict (.labels | default dict) .root.Values.commonLabels }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{- define "dualmap.metadata" -}}
name: {{ include "dualmap.fullname" .root }}-{{ .name | default .component }}
labels: {{- include "dualmap.labels" . | nindent 2 }}
{{- end -}}

{{/* An image by its tag, its digest, or both: dict "image" "version" (in place of a tag where there is no digest). */}}
{{- define "dualmap.imageOf" -}}
{{- $tag := .image.tag | default (ternary "" .version (not (empty .image.digest))) -}}
{{ .image.repository }}{{ with $tag }}:{{ . }}{{ end }}{{ with .image.digest }}@{{ . }}{{ end }}
{{- end -}}

{{- define "dualmap.image" -}}
{{ include "dualmap.imageOf" (dict "image" .Values.image "version" .Chart.AppVersion) }}
{{- end -}}

{{/* Names of Secrets to pull images with, each written as a name or as Kubernetes writes it: {name: …}. */}}
{{- define "dualmap.pullSecrets" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ kindIs "map" . | ternary (get (kindIs "map" . | ternary . dict) "name") . | quote }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* The store's URL of the own Valkey, or the given one. The kubelet puts the password in its place. */}}
{{- define "dualmap.storeUrl" -}}
{{- if .Values.store.url -}}
{{ .Values.store.url }}
{{- else -}}
redis://{{ if .Values.store.passwordSecret.name }}:$(STORE_PASSWORD)@{{ end }}{{ include "dualmap.fullname" . }}-valkey:6379/0
{{- end -}}
{{- end -}}

{{- define "dualmap.ownValkey" -}}
{{- if not (or .Values.store.url .Values.store.urlSecret.name) }}true{{ end -}}
{{- end -}}

{{/* One variable from a Secret, if one is named: dict "name" "secret" "key". */}}
{{- define "dualmap.secretVariable" -}}
{{- if .secret }}
- name: {{ .name }}
  valueFrom: {secretKeyRef: {name: {{ .secret | quote }}, key: {{ .key | quote }}}}
{{- end }}
{{- end -}}

{{/* The environment of a router, worker or picker: dict "root" "component". Each has the keys that it needs. */}}
{{- define "dualmap.environment" -}}
{{- $store := .root.Values.store -}}
{{- $keys := .root.Values.keys -}}
- {name: DUALMAP_CONFIG, value: /etc/dualmap/fleet.yaml}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- include "dualmap.secretVariable" (dict "name" "STORE_PASSWORD" "secret" $store.passwordSecret.name "key" $store.passwordSecret.key) }}
{{- if $store.urlSecret.name }}
{{- include "dualmap.secretVariable" (dict "name" "DUALMAP_STORE__URL" "secret" $store.urlSecret.name "key" $store.urlSecret.key) }}
{{- else }}
- {name: DUALMAP_STORE__URL, value: {{ include "dualmap.storeUrl" .root | quote }}}
{{- end }}
{{- if eq .component "worker" }}
{{- include "dualmap.secretVariable" (dict "name" "DUALMAP_WORKER__UPSTREAM_API_KEY" "secret" $keys.upstream.secretName "key" $keys.upstream.key) }}
{{- else }}
{{- range $variable, $secret := dict "ROUTER__ADMIN_KEY" $keys.admin "ROUTER__API_KEYS" $keys.api "ROUTER__UPSTREAM_API_KEY" $keys.upstream "ROUTER__ADMINS" $keys.admins "ROUTER__TENANT_CACHE_SECRET" $keys.tenantCache "ROUTER__RECORD_SALT" $keys.recordSalt "TENANTS" $keys.tenants }}
{{- include "dualmap.secretVariable" (dict "name" (printf "DUALMAP_%s" $variable) "secret" $secret.secretName "key" $secret.key) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Where pods run: those of one component on different hosts and zones, as far as there are any. */}}
{{- define "dualmap.placement" -}}
topologySpreadConstraints:
{{- with .values.topologySpreadConstraints }}
{{ toYaml . | indent 2 }}
{{- else }}
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "dualmap.selector" $ | nindent 8 }}
{{- end }}
{{- end }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" }}
{{- with index $.values $field }}
{{ toYaml (dict $field .) }}
{{- end }}
{{- end }}
{{- end -}}

{{/*
A Deployment of one of the fleet's processes: dict "root" "component" (router, worker or picker, which is also its command)
"values" (its section) "ports" "livenessProbe" "readinessProbe" (YAML) "graceSeconds" "serviceAccount" "environment" (YAML).
A pod is replaced before it is stopped.
*/}}
{{- define "dualmap.deployment" -}}
{{- $root := .root -}}
{{- $values := .values -}}
apiVersion: apps/v1
kind: Deployment
metadata: {{- include "dualmap.metadata" . | nindent 2 }}
spec:
  {{- if eq (dig "autoscaling" "kind" "none" $values) "none" }}
  replicas: {{ $values.replicas }}
  {{- end }}
  minReadySeconds: 5
  strategy: {rollingUpdate: {maxUnavailable: 0, maxSurge: 1}}
  selector:
    matchLabels: {{- include "dualmap.selector" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "dualmap.selector" . | nindent 8 }}
        dualmap/process: "true" # selected by the Service that is scraped
        {{- with include "dualmap.podLabels" (dict "root" $root "labels" $values.podLabels) }}{{ . | nindent 8 }}{{ end }}
      annotations:
        checksum/settings: {{ include "dualmap.settings" $root | sha256sum }} # processes read the settings when they start
        {{- with $values.podAnnotations }}{{ toYaml . | nindent 8 }}{{ end }}
    spec:
      serviceAccountName: {{ .serviceAccount | default $values.serviceAccountName | default "default" }}
      automountServiceAccountToken: {{ not (empty .serviceAccount) }}
      enableServiceLinks: false # a Service named dualmap would set DUALMAP_PORT and others
      terminationGracePeriodSeconds: {{ .graceSeconds }}
      securityContext: {{- toYaml $root.Values.podSecurityContext | nindent 8 }}
      {{- with include "dualmap.pullSecrets" $root }}{{ . | nindent 6 }}{{ end }}
      {{- include "dualmap.placement" . | nindent 6 }}
      {{- with $values.extraInitContainers }}
      initContainers: {{- tpl (toYaml .) $root | nindent 8 }}
      {{- end }}
      containers:
        - name: {{ .component }}
          image: {{ include "dualmap.image" $root | quote }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args:
            - {{ .component }}
            - --name=$(POD_NAME)
            {{- with $values.extraArgs }}{{ toYaml . | nindent 12 }}{{ end }}
          env:
            {{- include "dualmap.environment" . | nindent 12 }}
            {{- with .environment }}{{ . | nindent 12 }}{{ end }}
            {{- with $values.extraEnv }}{{ toYaml . | nindent 12 }}{{ end }}
          {{- with $values.extraEnvFrom }}
          envFrom: {{- toYaml . | nindent 12 }}
          {{- end }}
          ports: {{- .ports | nindent 12 }}
          readinessProbe: {{- .readinessProbe | nindent 12 }}
            periodSeconds: 1
            timeoutSeconds: 3
            failureThreshold: 3
          livenessProbe: {{- .livenessProbe | nindent 12 }}
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: 6
          startupProbe: {{- .livenessProbe | nindent 12 }}
            periodSeconds: 1
            timeoutSeconds: 5
            failureThreshold: 60
          {{- with $values.preStopSeconds }}
          lifecycle: {preStop: {sleep: {seconds: {{ . }}}}}
          {{- end }}
          resources: {{- toYaml $values.resources | nindent 12 }}
          securityContext: {{- toYaml $root.Values.securityContext | nindent 12 }}
          volumeMounts:
            - {name: settings, mountPath: /etc/dualmap, readOnly: true}
            - {name: tmp, mountPath: /tmp}
            {{- if $values.tlsSecret }}
            - {name: tls, mountPath: /etc/dualmap-tls, readOnly: true}
            {{- end }}
            {{- if $root.Values.upstreamTlsSecret }}
            - {name: upstream-tls, mountPath: /etc/dualmap-upstream-tls, readOnly: true}
            {{- end }}
            {{- if $root.Values.store.tlsSecret }}
            - {name: store-tls, mountPath: /etc/dualmap-store-tls, readOnly: true}
            {{- end }}
            {{- with $values.extraVolumeMounts }}{{ toYaml . | nindent 12 }}{{ end }}
        {{- with $values.extraContainers }}{{ tpl (toYaml .) $root | nindent 8 }}{{ end }}
      volumes:
        - {name: settings, configMap: {name: {{ include "dualmap.fullname" $root }}-settings}}
        - {name: tmp, emptyDir: {}}
        {{- with $values.tlsSecret }}
        - {name: tls, secret: {secretName: {{ . | quote }}}}
        {{- end }}
        {{- with $root.Values.upstreamTlsSecret }}
        - {name: upstream-tls, secret: {secretName: {{ . | quote }}}}
        {{- end }}
        {{- with $root.Values.store.tlsSecret }}
        - {name: store-tls, secret: {secretName: {{ . | quote }}}}
        {{- end }}
        {{- with $values.extraVolumes }}{{ toYaml . | nindent 8 }}{{ end }}
{{- end -}}

{{/*
The address at which other replicas reach a router or a picker: that of its pod, whose name no other pod resolves. Dict
"root" "port".
*/}}
{{- define "dualmap.advertised" -}}
{{- if eq .root.Values.fleet.router.host "0.0.0.0" -}}
- {name: DUALMAP_ROUTER__ADVERTISE_URL, value: "http://$(POD_IP):{{ .port }}"}
{{- end -}}
{{- end -}}

{{/* Seconds from the decision to end a router or picker until its process has ended, at the longest. Beyond the settings:
3 s to read the error of a cut answer, 5 s for the last transitions, 3 s to leave. */}}
{{- define "dualmap.graceSeconds" -}}
{{- $router := .root.Values.fleet.router -}}
{{- add (int .values.preStopSeconds) (ceil $router.settle_s | int) (ceil $router.drain_timeout_s | int) 11 -}}
{{- end -}}

{{/* A PodDisruptionBudget: dict "root" "component" "values". */}}
{{- define "dualmap.pdb" -}}
{{- if .values.pdb.enabled }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {{- include "dualmap.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .values.pdb.maxUnavailable }}
  selector:
    matchLabels: {{- include "dualmap.selector" . | nindent 6 }}
{{- end }}
{{- end -}}
