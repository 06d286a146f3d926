{{- define "baton.name" -}}
{{- if contains "baton" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-baton" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* Labels of an object: (dict "root" $ "component" "decode"). */}}
{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* Labels that select the pods of a component. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Kinds of workers in this release, as a list in JSON: (dict "root" $). */}}
{{- define "baton.workers" -}}
{{ ternary (list "prefill" "decode" "encode") (list "prefill" "decode") .root.Values.encode.enabled | toJson }}
{{- end }}

{{- define "baton.clusterSecret" -}}
{{ .Values.clusterSecret.existingSecret | default (printf "%s-cluster" (include "baton.name" .)) }}
{{- end }}

{{- define "baton.redisSecret" -}}
{{ .Values.redis.existingSecret | default (printf "%s-redis" (include "baton.name" .)) }}
{{- end }}
