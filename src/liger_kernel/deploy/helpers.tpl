{{- /* Every object and pod is called as the release. */}}
{{- define "liger.name" -}}
{{- if not (regexMatch "^PATTERN$" .Release.Name) -}}
{{- fail (printf "the release's name must be WORDS; got %s" .Release.Name) -}}
{{- end -}}
{{- .Release.Name -}}
{{- end }}

{{- /* The config of liger train: folders may name the release, so that two of them do not write to one. */}}
{{- define "liger.train" -}}
{{- $train := deepCopy .Values.train -}}
{{- range $name := list PLACES -}}
{{- with index $train $name }}{{ $_ := set $train $name (tpl . $) }}{{ end -}}
{{- end -}}
{{- toPrettyJson $train -}}
{{- end }}
